"""Several processes that run one simulation: how they meet, what they say to each other, and arrays that span them."""
