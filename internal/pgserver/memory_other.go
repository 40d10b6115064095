//go:build unix && !linux

package pgserver

func memoryDir() string { return "" }
