"""What one rank does: load, receive latents, denoise, hand them on, decode, and end cleanly."""
