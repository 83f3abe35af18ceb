"""What to run, and the orchestrator that runs it."""
