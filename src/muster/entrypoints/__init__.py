"""What scripts and start_training.sh call, and Hugging Face's Trainer in place of muster's loop."""
