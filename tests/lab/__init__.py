"""Real nodes in namespaces, and what the bundle must do on them."""
