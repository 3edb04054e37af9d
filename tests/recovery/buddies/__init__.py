"""State that no other rank holds, recovered from copies on buddies."""
