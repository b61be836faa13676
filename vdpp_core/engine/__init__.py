"""What one rank does: load, receive latents, denoise, pass them on, decode, and end cleanly."""
