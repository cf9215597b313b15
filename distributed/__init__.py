"""What a kernel author needs: teams, remote refs, semaphores, copies, schedules, the entry point."""
