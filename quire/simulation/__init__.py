"""The real scheduler and kvmanager cores in virtual time, between a modelled gateway and modelled executors."""
