"""What is known: models, clusters, workloads, plans and rules."""
