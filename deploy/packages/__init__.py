"""Builder of the release: wheel, sdist, Debian package, OCI image, SBOM and checksums."""
