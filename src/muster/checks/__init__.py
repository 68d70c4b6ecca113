"""Is this machine fit to train on?"""
