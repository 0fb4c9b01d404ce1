"""Real CNI clients against the real bundle, each on a node of its own."""
