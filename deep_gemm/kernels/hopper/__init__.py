"""Rules and launches of the templates for Hopper: wgmma, TMA, and a producer warpgroup beside the consumers."""
