"""Decisions about host ports: plans in, changes out."""
