#!/usr/bin/env bash
# The older name of: ./start_training.sh --distributed
exec "$(dirname "${BASH_SOURCE[0]}")/start_training.sh" --distributed "$@"
