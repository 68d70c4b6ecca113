"""One rank's life: join the others, build, train, score, leave."""
