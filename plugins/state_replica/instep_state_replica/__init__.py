"""A lost rank gets its state from its replicas: striped over all donors, digested as it arrives."""
