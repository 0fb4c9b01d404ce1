"""The only package that touches the machine."""
