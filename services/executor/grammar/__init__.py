"""Rules that an output must obey, as the executor follows them: compiled beside the steps, one matcher a sequence."""
