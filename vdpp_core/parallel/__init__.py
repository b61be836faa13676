"""How ranks share the work: process groups, hand-off between stages, and one file for each lockstep axis."""
