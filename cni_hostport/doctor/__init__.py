"""What the doctor concludes from facts about a node: pure."""
