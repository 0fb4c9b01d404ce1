"""Operator's commands, one file each."""
