"""How ranks share the work: the process group, the hand-off between stages, and one file for each way of splitting."""
