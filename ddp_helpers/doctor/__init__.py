"""What is wrong with this machine, or with this job, and what to type."""
