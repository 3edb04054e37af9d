"""Gloo process groups without a store: computed addresses, a persistent device, forced unblocking."""

from instep_init_gloo.plugin import InitGloo

__all__ = ["InitGloo"]
