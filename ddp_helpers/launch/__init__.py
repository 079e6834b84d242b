"""What runs on the machine you type on: standard library only, never imports torch."""
