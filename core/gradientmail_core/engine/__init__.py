"""What a node does: follow every chain, close some of them, and pass fragments to and from a learner."""
