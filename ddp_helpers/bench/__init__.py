"""Measure a job, predict it on other machines, find its fastest settings."""
