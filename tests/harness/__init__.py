"""What the programs of tests share: how they start and end processes, send junk as a server, and report."""
