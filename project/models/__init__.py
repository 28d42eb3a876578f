"""Networks in plain torch, one file each. A YAML names them by class path:
`project.models.cnn.CIFAR10CNN`."""
