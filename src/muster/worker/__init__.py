"""One rank: join the process group, build, train, evaluate, leave."""
