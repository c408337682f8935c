"""What a node does, as values: one frozen dataclass for each thing that happened.

Callbacks receive every event on the thread that made it happen; one that raises is logged and harms
nothing. ``describe`` gives the sentence a person reads.
"""
