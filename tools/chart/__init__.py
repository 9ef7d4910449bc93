"""What makes and checks the Helm chart: `make chart`."""
