# SPDX-License-Identifier: Apache-2.0
oscar_library(oscar_report report.c goals.c)
