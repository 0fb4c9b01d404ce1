"""Wiring of the node's helper process."""
