"""What `install` and `uninstall` decide: steps from facts, pure."""
