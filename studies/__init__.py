"""The paper's tables and figures, and ours: `python -m studies movielens --data ml-1m.zip --out study`."""
