"""The agent: one process a node that starts the ranks, sees them die or hang, and leads each recovery. Imports no torch."""
