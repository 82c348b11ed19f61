"""Ray clusters: demand for a slice creates that slice, and slices heal and rest."""
