"""Quality of a model under one or many engine configurations: what `katydid eval` measures and how it says so."""
