"""Text and bytes of netfilter: pure formats, no effects."""
