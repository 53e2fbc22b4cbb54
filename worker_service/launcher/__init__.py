"""Starting the ranks of a group, and keeping them running.

    launcher.py       restarts and ends ranks wherever they run; ranks as child processes
    ray_cluster.py    ranks as actors on the nodes of a Ray cluster

A launcher computes nothing and loads nothing. It runs its own command line once per rank, passes
signals on, and restarts a rank that was killed: the others keep their weights and meet it in the
next epoch. The ranks end with the launcher, even if it is killed.
"""
