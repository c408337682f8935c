"""Small recipes on top of a run's mailbox: shared work, fixed ranks, meeting points.

On a store whose creates race they take the run's precautions: a claim counts when it is still there two seconds
later. On one that keeps no two nodes apart (a run with ``syncer=``) units and ranks are refused; a barrier needs no
more than that somebody opens it, and works.
"""
