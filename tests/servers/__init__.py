"""What every inference server must do for us, tried on the servers themselves: `python -m servers`."""
