"""What this machine makes of a pair: how long its passes take, and what follows from that."""
