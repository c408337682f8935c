"""What nodes write to the mailbox, in what order, and what each may conclude."""
