"""What launchers start."""
