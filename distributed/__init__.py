"""For kernel authors: teams, remote refs, semaphores, copies, schedules, the entry point."""
