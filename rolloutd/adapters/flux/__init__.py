"""Change `flux`: a Kustomization or HelmRelease of each cluster is moved to a pinned source."""
