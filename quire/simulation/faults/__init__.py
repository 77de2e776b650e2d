"""The real cores of all services in virtual time, with faults drawn from a seed; a failing seed replays exactly."""
