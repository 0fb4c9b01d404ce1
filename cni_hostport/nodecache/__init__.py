"""Decisions of the node-local DNS agent."""
