//go:build !linux

package main

func exactSleeps() {}
