"""cni-hostport: host ports for Kubernetes and container nodes.

This file holds the version and nothing else: the plugin call must be able to
live without importing the package at all.
"""

__version__ = "0.1.0"
