"""Ways of splitting one UNet over ranks, each applied to it from outside."""
