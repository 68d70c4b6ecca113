"""What a run says about itself: metrics, rank balance, results, and how a terminal shows them."""
